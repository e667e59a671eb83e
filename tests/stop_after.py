"""A training that ends before its time."""

from transformers import TrainerCallback


class StopAfter(TrainerCallback):
    """Ends the training as a crash would: after a step, with only the checkpoints left."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step
