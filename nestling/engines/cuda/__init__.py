"""The cohort engine on a CUDA device: clients' steps recorded as graphs and replayed, many clients
side by side."""

from nestling.engines.cuda.cohort import CudaCohort
from nestling.engines.cuda.cuda_settings import CudaSettings

__all__ = ["CudaCohort", "CudaSettings"]
