# SPDX-License-Identifier: Apache-2.0
"""One call of a model: its options, its ids, the text that they spell."""
