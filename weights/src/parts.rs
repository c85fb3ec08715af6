//! Weights in parts: every owner of some has published them at once, in memory of its own, and none has all.
//!
//! Invariant: every value is in one part.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// What one owner has of the weights: ranges among all of them, with their values.
pub type OwnedWeights<'a> = Vec<(Range<usize>, &'a [f32])>;

/// Weights in the memory of their owners.
#[derive(Debug)]
pub(crate) struct WeightParts {
    /// The values of each owner.
    owners: Vec<Arc<[f32]>>,
    /// Sorted by start, without gaps.
    parts: Vec<WeightPart>,
    len: usize,
    /// All values together, once a reader needs them so.
    whole: OnceLock<Arc<[f32]>>,
}

/// Values that are neighbours, of one owner.
#[derive(Clone, Copy, Debug)]
struct WeightPart {
    /// The first, among all values.
    start: usize,
    len: usize,
    owner: usize,
    /// The first, among the values of the owner.
    from: usize,
}

impl WeightParts {
    /// Copies what each of `owners` has: ranges among all values with their values.
    ///
    /// # Panics
    /// If a value has two owners or none.
    pub(crate) fn copied<'a>(owners: impl IntoIterator<Item = OwnedWeights<'a>>) -> Self {
        let (mut parts, mut buffers) = (Vec::new(), Vec::new());
        for (owner, own) in owners.into_iter().enumerate() {
            let mut buffer = Vec::with_capacity(own.iter().map(|(_, values)| values.len()).sum());
            for (range, values) in own.into_iter().filter(|(range, _)| !range.is_empty()) {
                assert_eq!(range.len(), values.len(), "a range has its values");
                parts.push(WeightPart { start: range.start, len: range.len(), owner, from: buffer.len() });
                buffer.extend_from_slice(values);
            }
            buffers.push(Arc::from(buffer));
        }
        parts.sort_unstable_by_key(|part| part.start);
        let len = end_of(parts.iter().map(|part| part.start..part.start + part.len));
        Self { owners: buffers, parts, len, whole: OnceLock::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// All values together. The first call copies them.
    pub(crate) fn whole(&self) -> &[f32] {
        self.whole.get_or_init(|| {
            let mut all = Vec::with_capacity(self.len);
            self.pieces(0..self.len).for_each(|piece| all.extend_from_slice(piece));
            all.into()
        })
    }

    /// The values of a range, where they lie if they are neighbours.
    pub(crate) fn range(&self, range: Range<usize>) -> Cow<'_, [f32]> {
        let mut pieces = self.pieces(range.clone());
        match pieces.next() {
            None => Cow::Borrowed(&[]),
            Some(first) if first.len() == range.len() => Cow::Borrowed(first),
            Some(first) => {
                let mut values = Vec::with_capacity(range.len());
                values.extend_from_slice(first);
                pieces.for_each(|piece| values.extend_from_slice(piece));
                Cow::Owned(values)
            }
        }
    }

    /// The values of a range, in order, as they lie.
    pub(crate) fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = &[f32]> {
        let first = self.parts.partition_point(|part| part.start + part.len <= range.start);
        let inside = self.parts[first..].iter().take_while({
            let end = range.end;
            move |part| part.start < end
        });
        inside.map(move |part| {
            let (from, to) = (range.start.max(part.start), range.end.min(part.start + part.len));
            let values = &self.owners[part.owner][part.from..part.from + part.len];
            &values[from - part.start..to - part.start]
        })
    }
}

/// Number of the weights that `pieces` make up, in any order.
///
/// # Panics
/// If one is in two pieces or in none.
pub(crate) fn whole_len(pieces: &[(Range<usize>, &[f32])]) -> usize {
    let ranges = pieces.iter().filter(|(range, _)| !range.is_empty()).map(|(range, _)| range.clone());
    let mut ranges: Vec<Range<usize>> = ranges.collect();
    ranges.sort_unstable_by_key(|range| range.start);
    end_of(ranges.into_iter())
}

/// The end of ranges that follow each other from 0 on.
fn end_of(ranges: impl Iterator<Item = Range<usize>>) -> usize {
    ranges.fold(0, |end, range| {
        assert_eq!(range.start, end, "every value has one owner");
        range.end
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use trajectory::PolicyVersion;

    use super::*;
    use crate::hub::HubConfig;
    use crate::{
        Digest, Dtype, Hub, HubPublisher, PublishConfig, Publisher, Receipt, Snapshot, Subscriber, Values,
    };

    /// What one of two owners has.
    fn own(all: &[f32], owner: usize) -> OwnedWeights<'_> {
        let starts = (0..all.len()).step_by(300).enumerate().filter(move |(index, _)| index % 2 == owner);
        let ranges = starts.map(|(_, start)| start..(start + 300).min(all.len()));
        ranges.map(|range| (range.clone(), &all[range])).collect()
    }

    /// All values, and those of both owners.
    fn values(len: usize) -> (Vec<f32>, Values) {
        let all: Vec<f32> = (0..len).map(|index| index as f32 * 0.37).collect();
        let parts = Values::copied([own(&all, 1), own(&all, 0)]);
        (all, parts)
    }

    #[test]
    fn every_range_has_the_values_and_the_digest_is_that_of_all() {
        let (all, parts) = values(2_000);
        assert_eq!(parts.len(), 2_000);
        for range in [0..0, 0..300, 10..20, 299..301, 250..1_700, 1_999..2_000, 0..2_000] {
            assert_eq!(*parts.range(range.clone()), all[range]);
        }
        assert!(matches!(parts.range(310..320), Cow::Borrowed(_)), "values of one owner are not copied");
        let (all, parts) = values((9 << 20) / 4 + 11);
        for threads in [1, 3] {
            assert_eq!(Digest::of_values(&parts, threads), Digest::of(&all));
        }
        assert_eq!(parts[..], all[..], "a reader that needs all of them together gets them");
    }

    #[test]
    #[should_panic(expected = "every value has one owner")]
    fn a_value_without_an_owner_is_a_mistake() {
        drop(Values::copied([vec![(0..2, &[1.0, 2.0][..]), (3..4, &[3.0])]]));
    }

    #[test]
    fn a_version_in_parts_is_proven_as_any_other() {
        let (publisher, hub) = crate::memory::hub();
        let sampler = hub.subscribe("sampler").unwrap();
        let (all, parts) = values(2_000);
        publisher.publish(Snapshot::new(PolicyVersion(1), parts)).unwrap();
        let got = sampler.newest(None).unwrap().unwrap();
        assert_eq!(got.digest(), Digest::of(&all));
        let receipt = |digest| Receipt {
            version: PolicyVersion(1),
            digest,
            took: Duration::ZERO,
            stalled: Duration::ZERO,
            bytes: 0,
            taken: 8_000,
        };
        sampler.applied(receipt(Digest::of_values(&got.values, 1))).unwrap();
        assert_eq!(hub.lags().unwrap()[0].receipt.unwrap().taken, 8_000);
        let mut other = all;
        other[1_234] = 0.0;
        assert!(sampler.applied(receipt(Digest::of(&other))).is_err(), "another value is another version");
    }

    /// To other processes each owner's values go where they are read from, rounded as any other.
    #[test]
    fn owners_publish_to_every_memory() {
        let (all, _) = values(2_000);
        let pieces = [1, 0].map(|owner| own(&all, owner));
        let directory = tempfile::tempdir().unwrap();
        for dtype in Dtype::ALL {
            for (in_process, shm) in [(true, None), (false, None), (false, Some(directory.path().to_owned()))]
            {
                let hub = Hub::new(HubConfig { dtype, ..HubConfig::default() });
                let sampler = hub.subscribe("sampler").unwrap();
                let config = PublishConfig { in_process, shm, ..PublishConfig::default() };
                let publisher = HubPublisher::new(hub, config).unwrap();
                for _ in 0..2 {
                    // The second time it is compared.
                    publisher.publish_owned(PolicyVersion(1), pieces.to_vec(), None).unwrap();
                }
                let got = sampler.newest(None).unwrap().unwrap();
                assert_eq!(got.digest(), Snapshot::rounded(PolicyVersion(1), &all, dtype).digest());
                let parted = in_process && dtype == Dtype::F32;
                assert_eq!(got.values.together().is_err(), parted, "{dtype}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "every value has one owner")]
    fn pieces_that_overlap_are_a_mistake() {
        whole_len(&[(2..4, &[0.0; 2]), (0..3, &[0.0; 3])]);
    }
}
