"""The `sdpa` backend: attention in blocks of queries. Read sdpa, blocked, tile and far, skew."""
