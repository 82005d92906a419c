# SPDX-License-Identifier: Apache-2.0
"""Bytes on disk: sessions and snapshots in LMDB. It knows no torch, no model and no KV."""
