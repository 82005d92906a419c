# SPDX-License-Identifier: Apache-2.0
"""What a token path leaves behind: KV rows, anchors, their digests, and where they are kept."""
