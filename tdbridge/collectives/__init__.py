"""Reductions, exchanges and messages of whole trees, across both frameworks."""

from tdbridge.collectives.api import all_gather as all_gather
from tdbridge.collectives.api import all_reduce as all_reduce
from tdbridge.collectives.api import all_to_all as all_to_all
from tdbridge.collectives.api import broadcast as broadcast
from tdbridge.collectives.api import gather as gather
from tdbridge.collectives.api import irecv as irecv
from tdbridge.collectives.api import isend as isend
from tdbridge.collectives.api import recv as recv
from tdbridge.collectives.api import reduce as reduce
from tdbridge.collectives.api import reduce_scatter as reduce_scatter
from tdbridge.collectives.api import scatter as scatter
from tdbridge.collectives.api import send as send
from tdbridge.collectives.handle import Handle as Handle
from tdbridge.collectives.ops import Op as Op
from tdbridge.collectives.ops import premul_sum as premul_sum
