//! Copies of all weights, by several threads, into reused memory.
//!
//! Invariant: memory is reused only without other references. Fresh memory is many times slower than the copy,
//! because the system clears every page.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::parts::whole_len;
use crate::{Dtype, Values};

/// Copies kept for reuse: those of the newest version and the previous one.
const KEPT: usize = 2;
/// Minimum number of weights of a task.
const LEAST: usize = 1 << 18;

/// Makes copies of weights.
#[derive(Debug)]
pub struct Copier {
    threads: usize,
    /// Copies in use or free, to be reused.
    kept: Vec<Arc<[f32]>>,
}

impl Copier {
    /// A copier with up to `threads` threads.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        Self { threads: threads.max(1), kept: Vec::with_capacity(KEPT) }
    }

    /// A copy of `[parameters]` weights, rounded to `dtype`.
    #[must_use]
    pub fn copy(&mut self, values: &[f32], dtype: Dtype) -> Values {
        self.gather(&[(0..values.len(), values)], dtype)
    }

    /// The same of `pieces` that make up all weights.
    ///
    /// # Panics
    /// If a weight is in two pieces or in none.
    pub(crate) fn gather(&mut self, pieces: &[(Range<usize>, &[f32])], dtype: Dtype) -> Values {
        let threads = self.threads;
        let mut memory = self.memory(whole_len(pieces));
        let target = Arc::get_mut(&mut memory).expect("it has no other reference");
        for (range, values) in pieces {
            copy_rounded(values, &mut target[range.clone()], dtype, threads);
        }
        self.keep(&memory);
        memory.into()
    }

    /// `[len]` weights of unreferenced memory, with arbitrary content.
    pub(crate) fn memory(&mut self, len: usize) -> Arc<[f32]> {
        let free = self.kept.iter_mut().position(|kept| kept.len() == len && Arc::get_mut(kept).is_some());
        match free {
            Some(index) => self.kept.swap_remove(index),
            None => std::iter::repeat_n(0.0, len).collect(),
        }
    }

    /// Keeps `memory` for reuse once it is not referenced any more.
    pub(crate) fn keep(&mut self, memory: &Arc<[f32]>) {
        if self.kept.len() == KEPT {
            self.kept.remove(0);
        }
        self.kept.push(Arc::clone(memory));
    }
}

/// Copies `[n]` weights to `[n]` weights, rounded to `dtype`, by up to `threads` threads.
pub(crate) fn copy_rounded(values: &[f32], target: &mut [f32], dtype: Dtype, threads: usize) {
    let part = values.len().div_ceil(threads.max(1)).max(LEAST);
    let parts: Vec<_> = values.chunks(part).zip(target.chunks_mut(part)).collect();
    share(threads, parts, |(from, to)| match dtype {
        Dtype::F32 => to.copy_from_slice(from),
        Dtype::Bf16 => to.iter_mut().zip(from).for_each(|(to, from)| *to = dtype.round(*from)),
    });
}

/// Runs `work` on all `tasks`, on up to `threads` threads including the calling one; results in the order of the
/// tasks.
pub(crate) fn share<T: Send, R: Send>(threads: usize, tasks: Vec<T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    let threads = threads.min(tasks.len());
    if threads <= 1 {
        return tasks.into_iter().map(work).collect();
    }
    let tasks: Vec<Mutex<Option<T>>> = tasks.into_iter().map(Some).map(Mutex::new).collect();
    let next = AtomicUsize::new(0);
    let run = || {
        let mut done = Vec::new();
        while let index = next.fetch_add(1, Ordering::Relaxed)
            && let Some(task) = tasks.get(index)
        {
            let task = task.lock().ok().and_then(|mut task| task.take());
            done.push((index, work(task.expect("every index is given out once"))));
        }
        done
    };
    let mut done = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(run)).collect();
        let mut done = run();
        for other in others {
            done.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        done
    });
    done.sort_unstable_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_the_same_for_any_number_of_threads() {
        let values: Vec<f32> = (0..3 * LEAST + 17).map(|index| index as f32 * 1.1).collect();
        for threads in [1, 2, 3, 8] {
            let mut copier = Copier::new(threads);
            assert_eq!(copier.copy(&values, Dtype::F32)[..], values[..]);
            let rounded = copier.copy(&values, Dtype::Bf16);
            assert!(rounded.iter().zip(&values).all(|(a, b)| *a == Dtype::Bf16.round(*b)));
        }
        assert!(Copier::new(2).copy(&[], Dtype::F32).is_empty());
    }

    #[test]
    fn memory_is_used_again_once_it_is_free() {
        let mut copier = Copier::new(1);
        let first = copier.copy(&[1.0; 8], Dtype::F32);
        let second = copier.copy(&[2.0; 8], Dtype::F32);
        let place = first.as_ptr();
        assert_ne!(place, second.as_ptr(), "it is in use");
        drop(first);
        let third = copier.copy(&[3.0; 8], Dtype::F32);
        assert_eq!((place, third[0], second[0]), (third.as_ptr(), 3.0, 2.0));
    }
}
