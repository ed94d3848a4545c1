"""One torch thread a test process, as in every engine: sums then run in the same order everywhere."""

import torch

torch.set_num_threads(1)
