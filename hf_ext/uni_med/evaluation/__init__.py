"""Evaluation: answers, metrics, and the interference of tasks."""
