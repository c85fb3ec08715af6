//! A queue in which users take turns: a user with many requests delays those of another by one each.
//!
//! Invariant: between two takes of one user that waits all the time, at most one item of each other user is taken. The items of a
//! user are taken in the order in which they came. What waits is bounded, in all and for each user.

use std::collections::{HashMap, VecDeque};

use crate::outcome::Refusal;
use crate::training::UserId;

/// HTTP status of back-pressure.
const TOO_MANY_REQUESTS: u16 = 429;

/// Bounds of a [`FairQueue`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FairBounds {
    /// Most items that wait.
    pub total: usize,
    /// Most items of one user that wait.
    pub per_user: usize,
}

/// More items than may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QueueFull {
    /// Of all users.
    #[error("{waiting} requests wait, which is the limit; try again later")]
    Total {
        /// Items that wait.
        waiting: usize,
    },
    /// Of this user.
    #[error(
        "{waiting} of your requests wait and {new} more would exceed the limit of {limit}; wait for some of them to end"
    )]
    OfUser {
        /// Items of the user that wait.
        waiting: usize,
        /// Items that were to wait too.
        new: usize,
        /// Most items of a user.
        limit: usize,
    },
}

impl From<QueueFull> for Refusal {
    fn from(full: QueueFull) -> Self {
        Self { status: TOO_MANY_REQUESTS, message: full.to_string() }
    }
}

/// Items of users that wait.
#[derive(Debug)]
pub struct FairQueue<T> {
    bounds: FairBounds,
    /// Of users with items.
    items: HashMap<UserId, VecDeque<T>>,
    /// The users with items, each once; the first is next.
    turns: VecDeque<UserId>,
    len: usize,
}

impl<T> FairQueue<T> {
    /// An empty queue.
    #[must_use]
    pub fn new(bounds: FairBounds) -> Self {
        Self { bounds, items: HashMap::new(), turns: VecDeque::new(), len: 0 }
    }

    /// Adds an item of `user`.
    ///
    /// # Errors
    /// If as many wait as may.
    pub fn push(&mut self, user: UserId, item: T) -> Result<(), QueueFull> {
        self.push_all(user, vec![item])
    }

    /// Adds all of `new`, which are of `user`, or none.
    ///
    /// # Errors
    /// If not all of them may wait.
    pub fn push_all(&mut self, user: UserId, new: Vec<T>) -> Result<(), QueueFull> {
        let count = new.len();
        self.check(user, count)?;
        if count == 0 {
            return Ok(());
        }
        if self.len_of(user) == 0 {
            self.turns.push_back(user);
        }
        self.items.entry(user).or_default().extend(new);
        self.len += count;
        Ok(())
    }

    /// Whether `count` items of `user` may wait too.
    ///
    /// # Errors
    /// If they may not.
    pub fn check(&self, user: UserId, count: usize) -> Result<(), QueueFull> {
        let (waiting, limit) = (self.len_of(user), self.bounds.per_user);
        if waiting + count > limit {
            return Err(QueueFull::OfUser { waiting, new: count, limit });
        }
        if self.len + count > self.bounds.total {
            return Err(QueueFull::Total { waiting: self.len });
        }
        Ok(())
    }

    /// Takes the next item, which is the first of the user whose turn it is. `None` if none waits.
    pub fn pop(&mut self) -> Option<(UserId, T)> {
        let user = self.turns.pop_front()?;
        let own = self.items.get_mut(&user)?;
        let item = own.pop_front()?;
        self.len -= 1;
        if own.is_empty() {
            self.items.remove(&user);
        } else {
            self.turns.push_back(user);
        }
        Some((user, item))
    }

    /// Items that wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether none waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Items of `user` that wait.
    #[must_use]
    pub fn len_of(&self, user: UserId) -> usize {
        self.items.get(&user).map_or(0, VecDeque::len)
    }

    /// Users with items.
    #[must_use]
    pub fn users(&self) -> usize {
        self.turns.len()
    }

    /// Takes out the items that `removed` names, whatever turn it is; they are returned by user, in their order.
    pub fn remove(&mut self, mut removed: impl FnMut(UserId, &T) -> bool) -> Vec<(UserId, T)> {
        let mut all = Vec::new();
        for user in &self.turns {
            let Some(own) = self.items.get_mut(user) else { continue };
            let (gone, stay): (VecDeque<T>, VecDeque<T>) =
                own.drain(..).partition(|item| removed(*user, item));
            *own = stay;
            all.extend(gone.into_iter().map(|item| (*user, item)));
        }
        self.items.retain(|_, own| !own.is_empty());
        self.turns.retain(|user| self.items.contains_key(user));
        self.len -= all.len();
        all
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WIDE: FairBounds = FairBounds { total: 10_000, per_user: 10_000 };

    fn user(number: u8) -> UserId {
        UserId([number; 16])
    }

    #[test]
    fn a_single_request_passes_those_of_a_user_with_thousands() {
        let mut queue = FairQueue::new(WIDE);
        queue.push_all(user(1), (0..2000).collect()).unwrap();
        assert_eq!(queue.pop(), Some((user(1), 0)));
        queue.push(user(2), 7).unwrap();
        assert_eq!([queue.len(), queue.len_of(user(1)), queue.len_of(user(2))], [2000, 1999, 1]);
        assert_eq!(queue.pop(), Some((user(1), 1)));
        assert_eq!(queue.pop(), Some((user(2), 7)));
        assert_eq!((queue.pop(), queue.users()), (Some((user(1), 2)), 1));
    }

    #[test]
    fn what_waits_is_bounded() {
        let mut queue = FairQueue::new(FairBounds { total: 5, per_user: 3 });
        queue.push_all(user(1), vec![1, 2]).unwrap();
        let full = queue.push_all(user(1), vec![3, 4]).unwrap_err();
        assert_eq!(full, QueueFull::OfUser { waiting: 2, new: 2, limit: 3 });
        queue.push(user(1), 3).unwrap();
        queue.push_all(user(2), vec![4, 5]).unwrap();
        let full = queue.push(user(3), 6).unwrap_err();
        assert_eq!(full, QueueFull::Total { waiting: 5 });
        assert_eq!(Refusal::from(full).status, 429);
        queue.pop().unwrap();
        queue.push(user(3), 6).unwrap();
    }

    #[test]
    fn removed_items_leave_the_turns_of_others() {
        let mut queue = FairQueue::new(WIDE);
        for (of, item) in [(1, 10), (2, 20), (1, 11), (3, 30)] {
            queue.push(user(of), item).unwrap();
        }
        assert_eq!(queue.remove(|of, item| of == user(2) || *item == 10), [(user(1), 10), (user(2), 20)]);
        assert_eq!(queue.len(), 2);
        let rest: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(rest, [(user(1), 11), (user(3), 30)]);
        assert!(queue.is_empty() && queue.users() == 0);
    }

    proptest! {
        /// Whatever comes and goes, no user that waits sees another taken twice before it, and no order within a user changes.
        #[test]
        fn no_user_starves(calls in prop::collection::vec(prop::option::weighted(0.6, 0..5_u8), 1..300)) {
            let mut queue = FairQueue::new(WIDE);
            let (mut pushed, mut taken) = ([0_u32; 5], [0_u32; 5]);
            // Takes of others since the last take of each user, or since it began to wait.
            let mut since = [[0_u32; 5]; 5];
            for call in calls {
                match call {
                    Some(of) => {
                        let of = usize::from(of);
                        if pushed[of] == taken[of] {
                            since[of] = [0; 5];
                        }
                        queue.push(user(of as u8), pushed[of]).unwrap();
                        pushed[of] += 1;
                    }
                    None => {
                        let waiting = pushed.iter().sum::<u32>() - taken.iter().sum::<u32>();
                        let Some((UserId(id), item)) = queue.pop() else {
                            prop_assert_eq!(waiting, 0);
                            continue;
                        };
                        let of = usize::from(id[0]);
                        prop_assert_eq!(item, taken[of]);
                        taken[of] += 1;
                        since[of] = [0; 5];
                        for other in (0..5).filter(|other| *other != of && pushed[*other] > taken[*other]) {
                            since[other][of] += 1;
                            prop_assert!(since[other][of] <= 1, "{} waits for {} of {of}", other, since[other][of]);
                        }
                    }
                }
                prop_assert_eq!(queue.len() as u32, pushed.iter().sum::<u32>() - taken.iter().sum::<u32>());
            }
        }
    }
}
