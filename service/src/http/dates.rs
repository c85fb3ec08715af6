//! Times as JSON and HTTP write them.
//!
//! Invariant: times are in UTC. A time after the year 9999 is written as the last second before.

use chrono::DateTime;

/// The last second of the year 9999, seconds since 1970.
const LAST_S: u64 = 253_402_300_799;

/// Such as `2026-11-27T02:36:05Z`, of seconds since 1970.
pub(super) fn rfc3339(seconds: u64) -> String {
    formatted(seconds, "%Y-%m-%dT%H:%M:%SZ")
}

/// Such as `Fri, 27 Nov 2026 02:36:05 GMT`, of seconds since 1970.
pub(super) fn http_date(seconds: u64) -> String {
    formatted(seconds, "%a, %d %b %Y %H:%M:%S GMT")
}

fn formatted(seconds: u64, form: &str) -> String {
    let time = DateTime::from_timestamp(seconds.min(LAST_S).cast_signed(), 0);
    time.unwrap_or_default().format(form).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00Z");
        assert_eq!(rfc3339(951_827_696), "2000-02-29T12:34:56Z");
        assert_eq!(http_date(784_111_777), "Sun, 06 Nov 1994 08:49:37 GMT");
        for late in [LAST_S + 1, 1 << 60, u64::MAX] {
            assert_eq!(rfc3339(late), "9999-12-31T23:59:59Z");
        }
    }
}
