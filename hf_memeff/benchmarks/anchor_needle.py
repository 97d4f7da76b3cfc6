"""Needles: facts hidden in a long text, and whether a model that was asked for one still finds it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_memeff.benchmarks.anchor_calibrations import Calibrations
from hf_memeff.benchmarks.anchor_prefill import attention
from hf_memeff.benchmarks.anchor_qkv import for_length
from hf_memeff.benchmarks.anchor_results import NeedleResult
from hf_memeff.benchmarks.anchor_text import LongText
from hf_memeff.benchmarks.results import Environment
from hf_memeff.benchmarks.sage_text import as_prompt
from hf_memeff.benchmarks.shelf import Shelf
from hf_memeff.blocks.arguments import CACHE_NAMES
from hf_memeff.integrations.attention import AnchorAttentionConfig, anchor_report

DENSE, ANCHOR, SINKS = "dense", "anchor", "sinks-window"
METHODS = (DENSE, ANCHOR, SINKS)
LENGTHS = (2048, 4096, 8192)

_NO_CANDIDATE = -1e4  # a threshold that no key reaches: first block and window alone
_DOCUMENT = "<document>"


@dataclass(frozen=True)
class Needle:
    """One fact.

    Attributes:
        fact: sentence that is hidden.
        depth: where, 0 is the start of the text.
        questions: ways to ask for it, the last one in other words than the fact's.
        lead: how the answer starts, so that the very next token, the one that prefill predicts, has to be right.
        answer: what follows.
    """

    fact: str
    depth: float
    questions: tuple[str, ...]
    lead: str
    answer: str


NEEDLES = (
    Needle(
        "The secret code of the lighthouse is 48213.",
        0.15,
        ("What is the secret code of the lighthouse?", "Which number does one have to enter at the lighthouse?"),
        "The secret code of the lighthouse is",
        "48213",
    ),
    Needle(
        "The beekeepers meet every year in the town of Marlow.",
        0.4,
        ("In which town do the beekeepers meet every year?", "Where does the annual gathering of beekeepers happen?"),
        "The beekeepers meet every year in the town of",
        "Marlow",
    ),
    Needle(
        "The favourite dish of the old captain is pumpkin soup.",
        0.65,
        ("What is the favourite dish of the old captain?", "Which food does the aged skipper like best?"),
        "The favourite dish of the old captain is",
        "pumpkin",
    ),
)


@dataclass(frozen=True)
class NeedlePlan:
    """What is asked.

    Attributes:
        model: name of the model.
        needles: all in the same text, asked for one by one.
        answer_tokens: most tokens of an answer.
    """

    model: str = "SmolLM2-135M"
    needles: tuple[Needle, ...] = NEEDLES
    answer_tokens: int = 8


@dataclass(frozen=True)
class Haystack:
    """A text with needles and the questions that may follow it.

    Attributes:
        body: (1, tokens), start of the prompt and text.
        tails: by needle and question, (1, tokens) each: the question and the start of the answer.
    """

    body: Tensor
    tails: tuple[tuple[Needle, str, Tensor], ...]


def haystack(needles: Sequence[Needle], text: LongText, tokenizer: Any, tokens: int) -> Haystack:
    """Hide needles in the start of a text; the longest prompt has so many tokens."""

    def encode(words: str) -> Tensor:
        return torch.tensor(tokenizer(words, add_special_tokens=False).input_ids, dtype=torch.long)

    head = encode(as_prompt(tokenizer, _DOCUMENT).partition(_DOCUMENT)[0])
    tails = []
    for needle in needles:
        for question in needle.questions:
            end = as_prompt(tokenizer, f"{_DOCUMENT}\n\n{question}").partition(_DOCUMENT)[2]
            tails.append((needle, question, encode(end + needle.lead)[None]))
    facts = [encode(f" {needle.fact}") for needle in needles]
    room = tokens - len(head) - max(tail.shape[1] for _, _, tail in tails) - sum(map(len, facts))
    hay = text.measured(room)[0]
    parts, start = [head], 0
    for needle, fact in sorted(zip(needles, facts, strict=True), key=lambda pair: pair[0].depth):
        stop = round(needle.depth * room)
        parts += [hay[start:stop], fact]
        start = stop
    return Haystack(torch.cat([*parts, hay[start:]])[None], tuple(tails))


@dataclass
class Needles:
    """The questions to a model.

    Attributes:
        plan: what is asked.
        base: the `PreTrainedModel`.
        tokenizer: its tokenizer.
        text: to hide needles in.
        calibrations: thresholds, from other text.
        shelf: where results go.
        environment: what is measured with.
        advance: called with the name of what runs and the number of steps just done.
    """

    plan: NeedlePlan
    base: Any
    tokenizer: Any
    text: LongText
    calibrations: Calibrations
    shelf: Shelf[NeedleResult]
    environment: Environment
    advance: Callable[[str, int], object] = lambda text, steps: None

    def run(self, lengths: Sequence[int]) -> None:
        """Ask what is not there."""
        for tokens in lengths:
            for method in METHODS:
                if not self._found(tokens, method):
                    self._ask_all(tokens, method)

    def steps(self, lengths: Sequence[int]) -> int:
        """How many steps `run` will report to `advance`."""
        questions = sum(len(needle.questions) for needle in self.plan.needles)
        return questions * sum(not self._found(tokens, method) for tokens in lengths for method in METHODS)

    def _found(self, tokens: int, method: str) -> bool:
        found = self.shelf.find(f"{tokens}-{method}")
        calibrated = self.calibrations.tokens if method == ANCHOR else None
        return found is not None and (found.model, found.calibration_tokens) == (self.plan.model, calibrated)

    def _config(self, tokens: int, method: str) -> AnchorAttentionConfig:
        calibrated = replace(self.calibrations.get(tokens), min_length=1)
        if method == SINKS:
            return replace(calibrated, theta=_NO_CANDIDATE, thresholds=None)
        return calibrated

    def _ask_all(self, tokens: int, method: str) -> None:
        if self.calibrations.missing(tokens):
            self.advance(f"{tokens}: calibration", 0)
        config = self._config(tokens, method)
        model = for_length(self.base, tokens)
        hay = haystack(self.plan.needles, self.text, self.tokenizer, tokens)
        answers, losses, densities, calls = [], [], [], []
        self.advance(f"{tokens}, {method}: the text", 0)
        with attention(model, "sdpa" if method == DENSE else "anchor", config):
            session = _Session(model, self.tokenizer, hay.body, config, self.plan.answer_tokens)
            for needle, _, tail in hay.tails:
                answer, loss = session.ask(tail, needle.answer)
                report = anchor_report(model)
                answers.append(answer)
                losses.append(loss)
                densities.append(report.density if method != DENSE else 1.0)
                calls.append(report.sparse_calls if method != DENSE else 0)
                self.advance(f"{tokens}, {method}", 1)
        self.shelf.add(
            NeedleResult(
                model=self.plan.model,
                tokens=tokens,
                method=method,
                step=None if method == DENSE else config.step,
                calibration_tokens=self.calibrations.tokens if method == ANCHOR else None,
                questions=tuple(question for _, question, _ in hay.tails),
                depths=tuple(needle.depth for needle, _, _ in hay.tails),
                expected=tuple(needle.answer for needle, _, _ in hay.tails),
                answers=tuple(answers),
                answer_losses=tuple(losses),
                densities=tuple(densities),
                sparse_calls=tuple(calls),
                environment=self.environment,
            )
        )


class _Session:
    """A text in a cache, up to a border of superblocks, from where each question goes on.

    Prefill in chunks that end at such borders gives what the whole prompt's would, so the text is computed once.
    """

    def __init__(
        self, model: Any, tokenizer: Any, body: Tensor, config: AnchorAttentionConfig, answer_tokens: int
    ) -> None:
        self.model, self.tokenizer, self.answer_tokens = model, tokenizer, answer_tokens
        # transformers calls it cache from 5.24 on, and drops the older name in 5.40
        self.cache_name = next(name for name in CACHE_NAMES if name in inspect.signature(model.forward).parameters)
        superblock = config.block_size * config.step
        # what goes on has to be a block at least: fewer queries are computed densely
        self.border = max(0, body.shape[1] - config.block_size) // superblock * superblock
        self.rest = body[:, self.border :]
        self.cache: Any = None
        if self.border:
            self.cache = self._run(body[:, : self.border])[1]

    def ask(self, tail: Tensor, answer: str) -> tuple[str, float]:
        """What the model writes behind a question, and the mean cross-entropy of the right answer's tokens."""
        if self.cache is not None:
            _crop(self.cache, self.border)
        first, cache = self._run(torch.cat([self.rest, tail], 1))
        asked = cache.get_seq_length()
        ids = self.tokenizer(f" {answer}", add_special_tokens=False).input_ids
        right = torch.tensor(ids, dtype=torch.long, device=first.device)
        logits = first[None]
        if len(right) > 1:
            logits = torch.cat([logits, self._all_logits(right[None, :-1], cache)])
        loss = F.cross_entropy(logits.float(), right).item()
        _crop(cache, asked)
        written: list[int] = []
        while len(written) < self.answer_tokens:
            token = int(first.argmax())
            if token == self.tokenizer.eos_token_id:
                break
            written.append(token)
            first = self._all_logits(torch.tensor([[token]]), cache)[-1]
        return self.tokenizer.decode(written), loss

    @torch.no_grad()
    def _run(self, ids: Tensor) -> tuple[Tensor, Any]:
        """Logits (vocabulary,) behind the last token, and the cache."""
        ids = ids.to(self.model.device)
        found = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{self.cache_name: self.cache})
        return found.logits[0, -1], found.past_key_values

    @torch.no_grad()
    def _all_logits(self, ids: Tensor, cache: Any) -> Tensor:
        """Logits (tokens, vocabulary) behind each of some tokens."""
        return self.model(input_ids=ids.to(self.model.device), use_cache=True, **{self.cache_name: cache}).logits[0]


def _crop(cache: Any, tokens: int) -> None:
    """Forget what came after so many tokens."""
    later = cache.get_seq_length() - tokens
    if later > 0:
        cache.crop(-later)  # transformers 5.24 takes the number to remove alone
