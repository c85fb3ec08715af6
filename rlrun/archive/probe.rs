//! Whether a store does what an archive needs.
//!
//! Invariant: everything happens to one object with a random name, which is removed again.

use std::time::Instant;

use serde_json::json;

use super::bucket::{Bucket, BucketError};
use super::url::ArchiveScheme;
use super::{ArchiveError, ArchiveFindings, ArchiveRequest};
use crate::credentials;

/// Requests whose fastest is the round trip.
const ROUND_TRIPS: usize = 5;
/// Attempts at a conditional put.
const ATTEMPTS: usize = 5;
/// Difference of clocks above which signed requests are refused by S3, seconds.
const MAX_CLOCK_DIFFERENCE_S: f64 = 900.0;

/// Asserts that the store compares before it creates and before it replaces.
///
/// # Errors
/// [`ArchiveError::Unconditional`], or a store that cannot be used.
pub(super) fn conditional_put(bucket: &Bucket) -> Result<(), ArchiveError> {
    if bucket.url().scheme() == ArchiveScheme::Directory {
        // There a lock compares.
        return Ok(());
    }
    let url = bucket.url();
    let mut attempt = 0;
    loop {
        attempt += 1;
        let name = probe_name();
        let tried = try_conditional_put(bucket, &name);
        let removed = bucket.delete(&name);
        return match tried {
            Ok(None) => removed.map_err(|error| error.into_error(url, "remove an object")),
            Ok(Some(found)) => Err(ArchiveError::Unconditional { url: url.to_string(), found }),
            // A put under a condition is not repeated by itself.
            Err(BucketError::Unavailable(_) | BucketError::Conflict) if attempt < ATTEMPTS => continue,
            Err(error) => Err(error.into_error(url, "create an object under a condition")),
        };
    }
}

/// What the store did instead of a conditional put, if it has none.
fn try_conditional_put(bucket: &Bucket, name: &str) -> Result<Option<&'static str>, BucketError> {
    let first = match bucket.put_if(name, b"1".to_vec(), None) {
        Err(BucketError::Unavailable(reason)) if reason.contains("501") => {
            return Ok(Some("does not know the condition If-None-Match of a put (501)"));
        }
        first => first?,
    };
    let is_conflict = |result: Result<_, BucketError>| match result {
        Err(BucketError::Conflict) => Ok(true),
        Ok(_) => Ok(false),
        Err(error) => Err(error),
    };
    if !is_conflict(bucket.put_if(name, b"2".to_vec(), None))? {
        return Ok(Some("replaced an object that was only to be created (If-None-Match)"));
    }
    match bucket.put_if(name, b"3".to_vec(), Some(&first)) {
        Err(BucketError::Unavailable(reason)) if reason.contains("501") => {
            return Ok(Some("does not know the condition If-Match of a put (501)"));
        }
        replaced => drop(replaced?),
    }
    if !is_conflict(bucket.put_if(name, b"4".to_vec(), Some(&first)))? {
        return Ok(Some("replaced an object that had changed (If-Match)"));
    }
    Ok(None)
}

/// Tries every operation that a run needs.
pub(super) fn examine(request: &ArchiveRequest<'_>) -> ArchiveFindings {
    let url = request.url.to_string();
    let mut findings = ArchiveFindings { lines: vec![("url", url.clone())], json: json!({ "url": url }) };
    if let Err(error) = try_operations(request, &mut findings) {
        let error = error.to_string();
        findings.json["error"] = json!(error);
        findings.lines.push(("error", error));
    }
    findings
}

fn try_operations(request: &ArchiveRequest<'_>, findings: &mut ArchiveFindings) -> Result<(), ArchiveError> {
    let bucket = Bucket::open(request.url, request.environment)?;
    let (url, name) = (request.url, probe_name());
    let mut allowed = |what: &'static str| {
        findings.lines.push((what, "works".to_owned()));
        findings.json[what.replace(' ', "_")] = json!(true);
    };
    bucket.put(&name, b"1".to_vec()).map_err(|error| error.into_error(url, "put an object"))?;
    allowed("put");
    let tried = (|| {
        bucket.get(&name, 16).map_err(|error| error.into_error(url, "get an object"))?;
        allowed("get");
        bucket.list().map_err(|error| error.into_error(url, "list objects"))?;
        allowed("list");
        conditional_put(&bucket)?;
        allowed("conditional put");
        Ok(())
    })();
    bucket.delete(&name).map_err(|error| error.into_error(url, "delete an object"))?;
    allowed("delete");
    tried?;
    let mut fastest_s = f64::INFINITY;
    for _ in 0..ROUND_TRIPS {
        let clock = Instant::now();
        bucket.size(&name).map_err(|error| error.into_error(url, "look for an object"))?;
        fastest_s = fastest_s.min(clock.elapsed().as_secs_f64());
    }
    findings.lines.push(("round trip", format!("{:.1} ms", fastest_s * 1e3)));
    findings.json["round_trip_s"] = json!(fastest_s);
    if let Some(difference) = bucket.clock_difference() {
        // The header has whole seconds.
        let warning = if difference.abs() > MAX_CLOCK_DIFFERENCE_S {
            "; signed requests are refused: set the clock of this machine"
        } else {
            ""
        };
        findings.lines.push(("clock", format!("{difference:+.0} s from this machine to the store{warning}")));
        findings.json["clock_difference_s"] = json!(difference);
    }
    Ok(())
}

fn probe_name() -> String {
    // A name that is taken fails the probe with a conflict.
    format!("probe-{}", credentials::random_name().unwrap_or_default())
}
