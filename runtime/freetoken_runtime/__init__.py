# SPDX-License-Identifier: Apache-2.0
"""The engine: token ids in, token ids out. It knows no chat and no text."""
