"""Tasks: what is learned, one file each, and the one table of their names."""

from nestling.tasks.classification import Classification
from nestling.tasks.losses import losses
from nestling.tasks.multi_label import MultiLabel
from nestling.tasks.next_token import NextToken
from nestling.tasks.reconstruction import Reconstruction
from nestling.tasks.regression import Forecast, Regression
from nestling.tasks.task import Answers, Task

TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (Classification, MultiLabel, Regression, Forecast, Reconstruction, NextToken)
}
"""Name → what is learned."""

__all__ = [
    "TASKS",
    "Answers",
    "Classification",
    "Forecast",
    "MultiLabel",
    "NextToken",
    "Reconstruction",
    "Regression",
    "Task",
    "losses",
]
