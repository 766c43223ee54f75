"""What SDPA keeps under a tape, to the byte, and for how long."""

import gc
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from support.helpers import assert_same_bits, kept, only_on_cpu, random, taping
from tape.test_attention import BATCH, DIM, HEADS, LAYOUTS, MASKS, SEQ, attention, bias_of, inputs, mask_of
