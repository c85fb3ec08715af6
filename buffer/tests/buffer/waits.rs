//! Waits end when another call makes what they wait for possible.

use std::sync::Arc;
use std::time::{Duration, Instant};

use buffer::{AdmitRequest, Buffer, Producer};

use super::{NOW, SOON, config, v};

/// A reserve sampler waits before a hold begins, and gets the slot once another call expires that hold.
#[test]
fn a_call_that_expires_a_hold_ends_the_waits_of_others() {
    let buffer = Arc::new(Buffer::in_memory(config(2, 1)).unwrap());
    buffer.limit_samplers(1).unwrap();
    let of = |holder, limit, hold| AdmitRequest { served: v(0), limit, hold, holder };
    assert!(buffer.admit(of(Some(1), 0, None), NOW).unwrap().is_empty());
    let (waiting, request) = (Arc::clone(&buffer), of(Some(2), 1, None));
    let reserve = std::thread::spawn(move || waiting.admit(request, Duration::MAX).unwrap());
    let deadline = Instant::now() + SOON;
    // It is counted under the lock that its wait releases.
    while buffer.counted_samplers().unwrap() < 2 {
        assert!(Instant::now() < deadline);
        std::thread::yield_now();
    }
    let granted = buffer.admit(of(Some(1), 1, Some(Duration::from_millis(20))), NOW).unwrap();
    assert_eq!(granted.len(), 1);
    while !reserve.is_finished() {
        assert!(Instant::now() < deadline, "the reserve sampler was not woken");
        buffer.admit(of(None, 0, None), NOW).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(reserve.join().unwrap(), granted);
}
