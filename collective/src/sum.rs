//! The sum over ranks as a balanced binary tree.

/// Elements that are summed at a time: the partial sums of a block stay in the nearest cache.
const BLOCK: usize = 1024;

/// Sums slices of the length of `own`, `[n]`, given in order of rank, as a balanced binary tree whose left part is the
/// largest power of two of ranks; `own` receives the sums. `2^k` ranks from a multiple of `2^k` on are a subtree.
pub(crate) fn sum_as_tree(slices: &[&[f32]], own: &mut [f32]) {
    // Partial sums that wait for their neighbours, the highest first: a binary counter.
    let mut waiting: Vec<[f32; BLOCK]> = Vec::new();
    for (block, own) in own.chunks_mut(BLOCK).enumerate() {
        let at = block * BLOCK..block * BLOCK + own.len();
        let len = own.len();
        waiting.clear();
        for (index, slice) in slices.iter().enumerate() {
            own.copy_from_slice(&slice[at.clone()]);
            for _ in 0..index.trailing_ones() {
                add_to_last(&mut waiting, own);
            }
            if index + 1 < slices.len() {
                let mut sum = [0.0; BLOCK];
                sum[..len].copy_from_slice(own);
                waiting.push(sum);
            }
        }
        while !waiting.is_empty() {
            add_to_last(&mut waiting, own);
        }
    }
}

/// Adds `sums`, `[n]`, to the partial sum that waits last, and writes the result to `sums`.
fn add_to_last(waiting: &mut Vec<[f32; BLOCK]>, sums: &mut [f32]) {
    let left = waiting.pop().unwrap_or([0.0; BLOCK]);
    sums.iter_mut().zip(left).for_each(|(right, left)| *right += left);
}
