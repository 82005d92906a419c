# SPDX-License-Identifier: Apache-2.0
"""Are stored states right? A cold pass over their path tells."""
