"""Compressors of messages, and the exact number of bits of their codes.

A compressor encodes a message to a code and decodes the code to a message. This package counts the
bits of a code and `fedmcmc.wire` writes them. A new compressor is one class in one file, and does
not depend on any kernel.
"""

from fedmcmc.compression._bounds import bound_bits as bound_bits
from fedmcmc.compression._chain import chain as chain
from fedmcmc.compression._clip import clip as clip
from fedmcmc.compression._elias import SMALLEST_NORM as SMALLEST_NORM
from fedmcmc.compression._elias import as_vectors as as_vectors
from fedmcmc.compression._elias import message_bits as message_bits
from fedmcmc.compression._elias import place_bits as place_bits
from fedmcmc.compression._identity import Identity as Identity
from fedmcmc.compression._identity import identity as identity
from fedmcmc.compression._memory import Memory as Memory
from fedmcmc.compression._memory import memory as memory
from fedmcmc.compression._per_client import per_client as per_client
from fedmcmc.compression._quantize import Quantize as Quantize
from fedmcmc.compression._quantize import quantize as quantize
from fedmcmc.compression._sparsify import sparsify as sparsify
from fedmcmc.compression._top_k import top_k as top_k
from fedmcmc.compression._types import Compressor as Compressor
from fedmcmc.compression._types import Dense as Dense
from fedmcmc.compression._types import OneOf as OneOf
from fedmcmc.compression._types import Quantized as Quantized
from fedmcmc.compression._types import Sparse as Sparse
from fedmcmc.compression._types import WithExact as WithExact
from fedmcmc.compression._words import WORD_BITS as WORD_BITS
from fedmcmc.compression._words import Grid as Grid
from fedmcmc.compression._words import Limbs as Limbs
from fedmcmc.compression._words import Word as Word
from fedmcmc.compression._words import carry as carry
from fedmcmc.compression._words import host_words as host_words
from fedmcmc.compression._words import limbs as limbs
from fedmcmc.compression._words import limbs_of_host as limbs_of_host
