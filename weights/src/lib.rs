//! The backward edge: publish, subscribe, apply, receipts.
