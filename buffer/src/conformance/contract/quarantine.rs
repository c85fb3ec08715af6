//! Quarantined groups: they leave their lease, their slot is freed, and their task is generated again.

use trajectory::GroupId;

use super::super::BothSides;
use super::super::fixtures::{NOW, TRAINER, admit, generate, group, lease, leased, v};
use crate::Finalized;

pub(super) fn a_quarantined_group_leaves_its_lease_and_frees_its_slot(buffer: &dyn BothSides) {
    let keyed = buffer.submit("mine", group(GroupId(0), v(0))).unwrap().group.unwrap();
    let ids = generate(buffer, v(0), 2);
    assert_eq!(leased(buffer, 0), [0, 1]);
    let here = |sender: Option<String>| sender.is_none_or(|sender| sender.starts_with("127.0.0.1"));
    assert!(here(buffer.quarantine(ids[1]).unwrap()));
    assert_eq!(buffer.quarantine(ids[1]).unwrap(), None, "it is stored once");
    let rest = lease(buffer, 0, NOW).unwrap();
    assert_eq!(rest.groups.iter().map(|group| group.id).collect::<Vec<_>>(), [ids[0]]);
    let stats = buffer.stats().unwrap();
    assert_eq!((stats.quarantined, stats.leased, stats.again), (1, 1, 1));
    assert!(stats.to_string().contains("1 set aside because they cannot be trained on"), "{stats}");
    // Released, the rest makes a batch with other groups.
    buffer.release(rest.id).unwrap();
    assert_eq!(leased(buffer, 0), [0, keyed.0]);
    assert_eq!(admit(buffer, v(0), 1), [ids[1]], "its task is generated again");
    assert!(here(buffer.quarantine(keyed).unwrap()));
    assert_eq!(buffer.submit("mine", group(GroupId(0), v(0))).unwrap().answer, Finalized::Duplicate);
    assert_eq!(buffer.stats().unwrap().quarantined, 2);
    buffer.ack_through(TRAINER, v(1)).unwrap();
}
