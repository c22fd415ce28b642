"""Pictures, clips and sounds that rows name: found, measured, decoded, and made into a model's inputs."""

from lightrft.datasets.media.items import KINDS, Item
from lightrft.datasets.media.placing import NOTHING, Finder, Reads
from lightrft.datasets.media.reader import MediaReader
from lightrft.datasets.media.workers import Workers

__all__ = ["KINDS", "NOTHING", "Finder", "Item", "MediaReader", "Reads", "Workers"]
