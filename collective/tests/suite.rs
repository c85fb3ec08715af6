//! The conformance suite of one rank on a host. All values are functions of a seed, the rank and the position, so every rank
//! knows what the others send.
//!
//! Seed 1 draws the shards, so every run makes the same calls.

use std::ops::Range;

use collective::{CollectiveError, HostCollective};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Elements of the large message: 16 MiB.
const LARGE: usize = 4 << 20;
/// Rounds of small messages.
const SMALL: usize = 300;

/// Makes every call as one rank; panics if a result is not the documented one.
pub(crate) fn conforms(collective: &dyn HostCollective) {
    random_shards(collective);
    values_go_to_all(collective);
    every_pair_exchanges(collective);
    wrong_arguments_are_refused(collective);
    large_messages(collective);
    many_small_messages(collective);
    parts_are_independent(collective);
    collective.barrier().expect("all ranks come");
}

/// The suite on the parts of splits, with more or fewer calls on each, and a sum of a part beside one of all on another thread.
fn parts_are_independent(collective: &dyn HostCollective) {
    let (rank, world) = (collective.rank(), collective.world());
    for parts in [1, 2, world] {
        let part = collective.split(rank % parts).expect("splits");
        let expected = (rank / parts, (rank % parts..world).step_by(parts).len());
        assert_eq!((part.rank(), part.world()), expected, "rank {rank} in {parts} parts");
        for _ in 0..=rank % parts {
            random_shards(&*part);
            every_pair_exchanges(&*part);
        }
        let nested = part.split(0).expect("splits again");
        std::thread::scope(|scope| {
            scope.spawn(|| many_small_messages(&*nested));
            many_small_messages(collective);
        });
    }
}

fn random_shards(collective: &dyn HostCollective) {
    let mut random = ChaCha8Rng::seed_from_u64(1);
    for round in 0..40 {
        let len = random.next_u32() as usize % 5000;
        let mut cuts: Vec<usize> =
            (1..collective.world()).map(|_| random.next_u32() as usize % (len + 1)).collect();
        if round % 4 == 0 {
            // Empty shards at the beginning, the end and between.
            cuts.iter_mut().for_each(|cut| *cut = if *cut % 2 == 0 { 0 } else { len });
        }
        cuts.sort_unstable();
        let ends = cuts.iter().copied().chain([len]);
        let shards: Vec<_> =
            [0].into_iter().chain(cuts.iter().copied()).zip(ends).map(|(a, b)| a..b).collect();
        reduces_and_gathers(collective, &shards, round);
    }
}

/// Sums the values of all ranks and gathers the sums again, on all and on each alone.
fn reduces_and_gathers(collective: &dyn HostCollective, shards: &[Range<usize>], round: u64) {
    let (rank, world) = (collective.rank(), collective.world());
    let len = shards.last().map_or(0, |last| last.end);
    let values = values(round, rank, len);
    let mut own = vec![f32::NAN; shards[rank].len()];
    collective.reduce_scatter(&values, shards, &mut own).expect("sums");

    let others: Vec<_> = (0..world).map(|rank| self::values(round, rank, len)).collect();
    let sums: Vec<f32> = (0..len).map(|at| tree(&others, at)).collect();
    assert_eq!(bits(&own), bits(&sums[shards[rank].clone()]), "round {round}: sums of rank {rank}");

    let mut all = vec![f32::NAN; len];
    collective.all_gather(&own, shards, &mut all).expect("gathers");
    assert_eq!(bits(&all), bits(&sums), "round {round}: what rank {rank} gathers");
    // Once each in small rounds.
    for root in if len == LARGE { world - 1..world } else { 0..world } {
        let mut all = (rank == root).then(|| vec![f32::NAN; len]);
        collective.gather(root, &own, shards, all.as_deref_mut()).expect("gathers at the root");
        assert!(all.is_none_or(|all| bits(&all) == bits(&sums)), "round {round}: what root {root} gathers");
    }
}

/// Sums in place, and broadcasts of every rank.
fn values_go_to_all(collective: &dyn HostCollective) {
    let (rank, world) = (collective.rank(), collective.world());
    for len in [0, 1, world, 1000] {
        let others: Vec<_> = (0..world).map(|rank| values(len as u64, rank, len)).collect();
        let mut sums = others[rank].clone();
        collective.all_reduce(&mut sums).expect("sums in place");
        let expected: Vec<f32> = (0..len).map(|at| tree(&others, at)).collect();
        assert_eq!(bits(&sums), bits(&expected), "{len} sums of all");
        for (root, expected) in others.iter().enumerate() {
            let mut received = if rank == root { expected.clone() } else { vec![f32::NAN; len] };
            collective.broadcast(root, &mut received).expect("a broadcast");
            assert_eq!(bits(&received), bits(expected), "{len} values of {root}");
        }
    }
}

/// Ranks exchange as many values as the pair and the round say, also none.
fn every_pair_exchanges(collective: &dyn HostCollective) {
    let (rank, world) = (collective.rank(), collective.world());
    for round in [0, 1, 2, 3, 40_000] {
        let len = |from: usize, to: usize| (from * 7 + to * 3 + 1) % 5 * round;
        let ranges = |lens: Vec<usize>| -> Vec<Range<usize>> {
            let mut end = 0;
            let mut next = |len: usize| {
                end += len;
                end - len..end
            };
            lens.into_iter().map(&mut next).collect()
        };
        let part = |from: usize, to: usize| values(round as u64, from * world + to, len(from, to));
        let sent: Vec<f32> = (0..world).flat_map(|to| part(rank, to)).collect();
        let sends = ranges((0..world).map(|to| len(rank, to)).collect());
        let receives = ranges((0..world).map(|from| len(from, rank)).collect());
        let mut received = vec![f32::NAN; receives.last().map_or(0, |last| last.end)];
        collective.all_to_all(&sent, &sends, &mut received, &receives).expect("all pairs exchange");
        let expected: Vec<f32> = (0..world).flat_map(|from| part(from, rank)).collect();
        assert_eq!(bits(&received), bits(&expected), "round {round}: what rank {rank} receives");
    }
}

/// Each is refused before anything is sent, so that the calls after it go on.
fn wrong_arguments_are_refused(collective: &dyn HostCollective) {
    let (rank, world) = (collective.rank(), collective.world());
    let shards: Vec<_> = (0..world).map(|rank| rank..rank + 1).collect();
    let refused = |result: Result<(), _>, because: &str| {
        let error: CollectiveError = result.expect_err(because);
        assert!(error.to_string().contains(because), "{error}");
    };
    refused(collective.all_gather(&[0.0], &shards[1..], &mut vec![0.0; world]), "shards for");
    refused(collective.all_gather(&[0.0, 0.0], &shards, &mut vec![0.0; world]), "2 values for its shard");
    refused(collective.all_gather(&[0.0], &shards, &mut vec![0.0; world + 1]), "but the shards end at");
    let gap: Vec<_> = (0..world).map(|rank| rank + 1..rank + 2).collect();
    refused(collective.reduce_scatter(&vec![0.0; world + 1], &gap, &mut [0.0]), "does not begin at 0");
    refused(collective.broadcast_bytes(world, Vec::new()).map(drop), "there is no rank");
    refused(collective.gather_bytes(world, Vec::new()).map(drop), "there is no rank");
    let mut gathered = vec![0.0; world];
    let gathered = (rank != 0).then_some(&mut gathered[..]);
    refused(collective.gather(0, &[0.0], &shards, gathered), "it alone");
}

fn large_messages(collective: &dyn HostCollective) {
    let (rank, world) = (collective.rank(), collective.world());
    let shards: Vec<_> = (0..world).map(|r| LARGE * r / world..LARGE * (r + 1) / world).collect();
    reduces_and_gathers(collective, &shards, 1000);
    let bytes = |rank: usize| -> Vec<u8> {
        (0..LARGE * 4).map(|at| (at % 251) as u8 ^ u8::try_from(rank).expect("few ranks")).collect()
    };
    let root = world - 1;
    let given = if rank == root { bytes(root) } else { Vec::new() };
    assert!(collective.broadcast_bytes(root, given).expect("a large broadcast") == bytes(root));
    let all = collective.all_gather_bytes(bytes(rank)).expect("large bytes");
    assert!(all.iter().enumerate().all(|(rank, got)| *got == bytes(rank)));
    let at_root = collective.gather_bytes(root, bytes(rank)).expect("large bytes at the root");
    assert!(at_root == (rank == root).then_some(all));
}

fn many_small_messages(collective: &dyn HostCollective) {
    let (rank, world) = (collective.rank(), collective.world());
    for round in 0..SMALL {
        let root = round % world;
        let given = if rank == root { round.to_le_bytes().to_vec() } else { vec![7; 3] };
        assert_eq!(collective.broadcast_bytes(root, given).expect("a command"), round.to_le_bytes());
        // Of different lengths, among them none.
        let all = collective.all_gather_bytes(vec![rank as u8; (round + rank) % 5]).expect("few bytes");
        let expected: Vec<_> = (0..world).map(|rank| vec![rank as u8; (round + rank) % 5]).collect();
        assert_eq!(all, expected);
        let at_root = collective.gather_bytes(root, all[rank].clone()).expect("few bytes at the root");
        assert_eq!(at_root, (rank == root).then_some(expected));
        if round % 10 == 0 {
            collective.barrier().expect("all ranks come");
        }
    }
}

/// The sum of the values of some ranks at one place, by recursion.
fn tree(ranks: &[Vec<f32>], at: usize) -> f32 {
    match ranks {
        [] => 0.0,
        [one] => one[at],
        _ => {
            let (left, right) = ranks.split_at(ranks.len().next_power_of_two() / 2);
            tree(left, at) + tree(right, at)
        }
    }
}

/// `[len]` values of very different size, so that another order of additions has other bits.
fn values(round: u64, rank: usize, len: usize) -> Vec<f32> {
    let seed = (round * 1000 + rank as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    // A multiplicative hash; the bits of the exponent are drawn from 24 sizes around 1.
    let value = |at: u64| {
        let hash = (seed ^ at).wrapping_mul(0xd6e8_feb8_6659_fd93);
        let exponent = 115 + (hash >> 59) as u32 % 24;
        f32::from_bits((hash >> 20) as u32 & 0x807f_ffff | exponent << 23)
    };
    (0..len as u64).map(value).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
