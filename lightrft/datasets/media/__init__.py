"""Images, videos and sounds of rows: located, measured, decoded and converted to model inputs."""

from lightrft.datasets.media.items import Item
from lightrft.datasets.media.parts import KINDS
from lightrft.datasets.media.placeholders import NOTHING, MediaFinder, SupportedMedia
from lightrft.datasets.media.prefetch import Workers
from lightrft.datasets.media.reader import MediaReader

__all__ = ["KINDS", NOTHING, MediaFinder, Item, MediaReader, SupportedMedia, Workers]
