//! Groups that are set aside: they leave their lease, their slot is free, and their task is generated again.

use buffer::Finalized;
use trajectory::GroupId;

use super::super::{NOW, TRAINER, admit, generate, group, lease, leased, v};
use super::ProducerAndConsumer;

pub(super) fn what_cannot_be_trained_on_leaves_its_lease_and_its_slot(buffer: &impl ProducerAndConsumer) {
    let keyed = buffer.submit("mine", group(GroupId(0), v(0))).unwrap().group.unwrap();
    let ids = generate(buffer, v(0), 2);
    assert_eq!(leased(buffer, 0), [0, 1]);
    let here = |sender: Option<String>| sender.is_none_or(|sender| sender.starts_with("127.0.0.1"));
    assert!(here(buffer.quarantine(ids[1]).unwrap()));
    assert_eq!(buffer.quarantine(ids[1]).unwrap(), None, "it is there once");
    let rest = lease(buffer, 0, NOW).unwrap();
    assert_eq!(rest.groups.iter().map(|group| group.id).collect::<Vec<_>>(), [ids[0]]);
    let stats = buffer.stats().unwrap();
    assert_eq!((stats.quarantined, stats.leased, stats.again), (1, 1, 1));
    assert!(stats.to_string().contains("1 set aside because they cannot be trained on"), "{stats}");
    // Given back, the rest makes a batch with others.
    buffer.release(rest.id).unwrap();
    assert_eq!(leased(buffer, 0), [0, keyed.0]);
    assert_eq!(admit(buffer, v(0), 1), [ids[1]], "its task is generated again");
    assert!(here(buffer.quarantine(keyed).unwrap()));
    assert_eq!(buffer.submit("mine", group(GroupId(0), v(0))).unwrap().answer, Finalized::Duplicate);
    assert_eq!(buffer.stats().unwrap().quarantined, 2);
    buffer.ack_through(TRAINER, v(1)).unwrap();
}
