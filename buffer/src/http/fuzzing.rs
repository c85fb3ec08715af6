//! The parsers of bodies, for [`crate::fuzzing`]. Invariant: they are called as in the routes.

use trajectory::Group;

use super::body::WireFormat;
use super::wire::{
    AbandonRequest, AbortRequest, AckThroughRequest, AdmissionsRequest, AppendRequest, ClaimRequest,
    EmptyRequest, ExtendRequest, ItemLimits, LeasesRequest, VersionRequest,
};

fn format(choice: u8) -> WireFormat {
    if choice.is_multiple_of(2) { WireFormat::Json } else { WireFormat::MessagePack }
}

/// Decodes `body` as one of the requests.
pub(crate) fn decode(choice: u8, body: &[u8]) {
    let format = format(choice);
    match choice / 2 % 9 {
        0 => drop(format.decode::<AdmissionsRequest>(body).and_then(|request| request.check())),
        1 => drop(format.decode::<LeasesRequest>(body).and_then(LeasesRequest::check)),
        2 => drop(format.decode::<ExtendRequest>(body).and_then(|request| request.check())),
        3 => drop(format.decode::<AckThroughRequest>(body)),
        4 => drop(format.decode::<VersionRequest>(body)),
        5 => drop(format.decode::<ClaimRequest>(body)),
        6 => drop(format.decode::<AbortRequest>(body)),
        7 => drop(format.decode::<AbandonRequest>(body)),
        _ => drop(format.decode::<EmptyRequest>(body)),
    }
}

/// The valid groups of `body`.
pub(crate) fn groups(choice: u8, body: &[u8]) -> Vec<Group> {
    let Ok(request) = format(choice).decode::<AppendRequest>(body) else { return Vec::new() };
    let limits = ItemLimits {
        trajectories: 64,
        tokens: 1 << 16,
        vocabulary: Some(200_000),
        values: 1 << 14,
        name_bytes: 256,
        depth: 64,
        correct: false,
    };
    request.groups.into_iter().filter_map(|group| Some(group.check(limits).ok()?.1)).collect()
}
