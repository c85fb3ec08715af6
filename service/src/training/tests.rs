//! The service over a tiny model.
