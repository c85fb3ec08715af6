//! The forward edge: admission, staleness, leases and a durable journal of groups.
