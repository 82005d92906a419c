# SPDX-License-Identifier: Apache-2.0
"""From functions to tools: schemas, arguments, results, what went wrong."""
