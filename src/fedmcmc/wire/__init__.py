"""Bit strings of messages: the bytes that a network carries.

A compressor's code (`Dense`, `Quantized` or `Sparse`) becomes exactly as many bits as the
compressor reports, padded with zeros to whole bytes. The parts that the compressor leaves exact
(`fedmcmc.types.Uncompressed`) follow. Any other pytree of numbers, such as a broadcast or a
client's state, is written number by number. Shapes and types are not sent, because the receiver
derives them from the model. Numbers are big-endian, trees are in the order of `jax.tree.leaves`,
and vectors follow each other without gaps.

=============  ====================================================================================
vector         bits
=============  ====================================================================================
dense          its numbers, big-endian IEEE
quantized      the norm, 32 bits; nothing more if the norm is zero or subnormal. Otherwise a flag.
               Flag 0: ``|k| + 1`` of all levels, and the signs of the nonzero levels (1: negative).
               Flag 1: ``num_nonzero + 1``, the gaps between the nonzero levels, their signs, and
               their ``|k|``
sparse         a flag. Flag 0: all numbers. Flag 1: ``num_nonzero + 1``, the gaps, and the nonzero
               numbers
=============  ====================================================================================

The flag is 1 only if that takes fewer bits. Integers are in the omega code of Elias (1975): a
codeword consists of groups that begin with 1, each of the length that the previous group encodes,
and a final 0. The codewords of a list are interleaved group by group, so that they can be decoded
together. First come the first bits of all codewords (0: end of the codeword), then the remaining
bits of the first group of each continued codeword, then the next bit of these codewords, and so on.
The total number of bits does not change.
"""

from fedmcmc.wire._messages import decode as decode
from fedmcmc.wire._messages import encode as encode
from fedmcmc.wire._messages import make_decoder as make_decoder
