"""Codes and other messages as bit strings: what they really take on a network.

The code of a compressor is `Dense`, `Quantized` or `Sparse`. Its string has exactly the bits that
the compressor reports, filled up to whole bytes with zeros; parts of a message that it leaves alone
(`fedmcmc.Uncompressed`) follow. Any other pytree of numbers (a message that is not compressed, a
broadcast, a client's state) is written number by number. Neither shapes nor types are
sent; the receiver knows them, as it knows the model. All numbers are written with the highest bit
first, trees in the order of `jax.tree.leaves`, vectors one after another with nothing in between.

=============  ====================================================================================
vector         bits
=============  ====================================================================================
dense          its numbers, big-endian IEEE
quantized      the norm, 32 bits; if it is zero or subnormal, nothing more (whatever the levels);
               else a flag and, *0*: ``|k| + 1`` of all levels, the signs of those that are not
               zero (1 is negative); *1*: ``nonzeros + 1``, the gaps between the nonzeros, their
               signs, their ``|k|``
sparse         a flag and, *0*: all its numbers; *1*: ``nonzeros + 1``, the gaps, the numbers that
               are not zero
=============  ====================================================================================

The flag is 1 only where that takes fewer bits. Integers are in the omega code of Elias (1975), in
which a codeword is groups that begin with 1, each as long as the group before says, and a final 0.
The codewords of a list are not written one after another but by groups, so that many are read at
once: the first bits of all codewords (0: finished); then what remains of the first group of those
that go on; then the first bits of what follows in these; and so on. That takes the same bits.
"""

from fedmcmc.wire._messages import decode as decode
from fedmcmc.wire._messages import encode as encode
from fedmcmc.wire._messages import reader as reader
