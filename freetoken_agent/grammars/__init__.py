# SPDX-License-Identifier: Apache-2.0
"""What a model may write next: pieces of grammars, and the mask over token ids."""
