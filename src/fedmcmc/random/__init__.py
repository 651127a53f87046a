"""Random keys of clients, rounds and the server, and bulk draws from keys.

This package contains all numbers that fedmcmc folds into keys.
"""

from fedmcmc.random._chacha import CHACHA as CHACHA
from fedmcmc.random._chacha import generator_named as generator_named
from fedmcmc.random._chacha import secret_key as secret_key
from fedmcmc.random._chacha import secret_words as secret_words
from fedmcmc.random._shuffles import shuffle_words as shuffle_words
from fedmcmc.random._shuffles import shuffled as shuffled
from fedmcmc.random._streams import as_key as as_key
from fedmcmc.random._streams import as_keys as as_keys
from fedmcmc.random._streams import augmentation_key as augmentation_key
from fedmcmc.random._streams import client_key as client_key
from fedmcmc.random._streams import cohort_key as cohort_key
from fedmcmc.random._streams import compressor_key as compressor_key
from fedmcmc.random._streams import distinct_integers as distinct_integers
from fedmcmc.random._streams import draw_key as draw_key
from fedmcmc.random._streams import fault_key as fault_key
from fedmcmc.random._streams import final_key as final_key
from fedmcmc.random._streams import folded_key as folded_key
from fedmcmc.random._streams import init_key as init_key
from fedmcmc.random._streams import integers_below as integers_below
from fedmcmc.random._streams import normals as normals
from fedmcmc.random._streams import normals_like as normals_like
from fedmcmc.random._streams import part_key as part_key
from fedmcmc.random._streams import phase_key as phase_key
from fedmcmc.random._streams import random_words as random_words
from fedmcmc.random._streams import realize_normals as realize_normals
from fedmcmc.random._streams import realize_words as realize_words
from fedmcmc.random._streams import server_key as server_key
from fedmcmc.random._streams import shared_key as shared_key
from fedmcmc.random._streams import start_key as start_key
from fedmcmc.random._streams import stream_key as stream_key
from fedmcmc.random._streams import uniforms_like as uniforms_like
from fedmcmc.random._streams import word_halves as word_halves
