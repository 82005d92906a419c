# SPDX-License-Identifier: Apache-2.0
"""Tool-using agents on a model in your own process, with an editable, durable context."""
