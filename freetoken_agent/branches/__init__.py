# SPDX-License-Identifier: Apache-2.0
"""What is beneath a session: paths, edits, commits, prices. Nothing here is public."""
