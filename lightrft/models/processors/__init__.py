"""Processors: from decoded media to the inputs of a family's towers, and to the text that stands
for them in a prompt."""

from lightrft.models.processors.base import Part, Processor, load_processor

__all__ = ["Part", "Processor", "load_processor"]
