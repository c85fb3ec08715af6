//! What a trajectory is worth: built-in reward functions and their weighted sum.
