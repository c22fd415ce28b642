"""Processors of media.

They turn decoded media into tower inputs, and into placeholder text of a prompt.
"""

from lightrft.models.processors.base import ModalityProcessor, Processor, load_processor

__all__ = ["ModalityProcessor", "Processor", "load_processor"]
