# SPDX-License-Identifier: Apache-2.0
"""What a chat template writes around contents, learned from the template itself."""
