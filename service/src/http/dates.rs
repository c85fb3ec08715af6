//! Times as JSON and HTTP write them.
//!
//! Invariant: times are in UTC. One that a calendar of four digits does not have is written as the first second of 1970.

use chrono::{DateTime, Datelike as _};

/// Such as `2026-11-27T02:36:05Z`, of seconds since 1970.
pub(super) fn rfc3339(seconds: u64) -> String {
    formatted(seconds, "%Y-%m-%dT%H:%M:%SZ")
}

/// Such as `Fri, 27 Nov 2026 02:36:05 GMT`, of seconds since 1970.
pub(super) fn http_date(seconds: u64) -> String {
    formatted(seconds, "%a, %d %b %Y %H:%M:%S GMT")
}

fn formatted(seconds: u64, form: &str) -> String {
    let time = i64::try_from(seconds).ok().and_then(|seconds| DateTime::from_timestamp(seconds, 0));
    time.filter(|time| time.year() <= 9999).unwrap_or_default().format(form).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00Z");
        assert_eq!(rfc3339(951_827_696), "2000-02-29T12:34:56Z");
        assert_eq!(http_date(784_111_777), "Sun, 06 Nov 1994 08:49:37 GMT");
        for late in [253_402_300_800, 1 << 60, u64::MAX] {
            assert_eq!(rfc3339(late), rfc3339(0));
        }
    }
}
