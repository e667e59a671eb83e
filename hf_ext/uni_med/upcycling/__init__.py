"""Uni-Med's connector in other models: the trained projector becomes a mixture of experts, as a PEFT method."""
