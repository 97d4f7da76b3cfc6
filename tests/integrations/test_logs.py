"""Values of callbacks in the Trainer's logs."""

from transformers import TrainerState

from hf_memeff.integrations.logs import add_to_logs


def test_both_copies_of_the_entry_get_the_values():
    state, logs = TrainerState(), {"loss": 1.0}
    state.global_step = 3
    state.log_history = [{"loss": 2.0, "step": 2}, {"loss": 1.0, "step": 3}]
    add_to_logs(state, logs, {"sage/x": 0.5})
    assert logs == {"loss": 1.0, "sage/x": 0.5}
    assert state.log_history == [{"loss": 2.0, "step": 2}, {"loss": 1.0, "step": 3, "sage/x": 0.5}]


def test_an_entry_of_an_earlier_step_is_left_alone():
    state = TrainerState()
    state.global_step = 3
    state.log_history = [{"loss": 2.0, "step": 2}]
    add_to_logs(state, None, {"sage/x": 0.5})
    assert state.log_history == [{"loss": 2.0, "step": 2}]
