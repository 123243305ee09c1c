//! The root of a communicator: threads of the process that created its ID.

use super::socket::{self, Call, Hello, Kind, listen, receive, send};
use crate::numbers::{Format, decoded, encoded};
use std::collections::VecDeque;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

/// `ncclDataType_t`.
const FLOAT16: u64 = 6;
const FLOAT32: u64 = 7;
const BFLOAT16: u64 = 9;
/// `ncclRedOp_t`.
pub(crate) const SUM: u64 = 0;
/// `ncclNumOps`: the first number of a user's operation.
pub(crate) const FIRST_OWN: usize = 5;
/// A product with a factor, whose bits are the lower half of the number, then a sum.
pub(crate) const SCALED: u64 = 1 << 32;

/// Formats that are supported here.
pub(crate) fn format(data_type: i32) -> Option<Format> {
    match u64::try_from(data_type).ok()? {
        FLOAT16 => Some(Format::F16),
        FLOAT32 => Some(Format::F32),
        BFLOAT16 => Some(Format::Bf16),
        _ => None,
    }
}

/// Starts to wait for ranks; returns the root's name.
pub(crate) fn open() -> io::Result<Vec<u8>> {
    static OPENED: AtomicU64 = AtomicU64::new(0);
    let number = OPENED.fetch_add(1, Ordering::Relaxed);
    let name = format!("switchyard-nccl-{}-{number}", std::process::id()).into_bytes();
    let listener = listen(&name)?;
    // The thread ends with the communicator, or with the process if no rank joins.
    std::thread::Builder::new().name("nccl-root".to_owned()).spawn(move || serve(&listener))?;
    Ok(name)
}

/// A rank's message; `None` if its connection was lost.
type Message = (usize, Option<(Kind, Vec<u8>)>);

fn serve(listener: &UnixListener) {
    let Ok((hosts, ranks)) = accept_ranks(listener) else { return };
    let (sender, messages) = channel();
    for (rank, stream) in ranks.iter().enumerate() {
        let (stream, sender) = (Arc::clone(stream), sender.clone());
        std::thread::spawn(move || listen_to(&stream, rank, &sender));
    }
    for (rank, stream) in ranks.iter().enumerate() {
        let next_is_local = hosts[rank] == hosts[(rank + 1) % hosts.len()];
        drop(send(stream, Kind::Ready, &[&[u8::from(next_is_local)]]));
    }
    reduce_until_done(&ranks, &messages);
}

/// Accepts all ranks; returns their hosts and connections in rank order.
fn accept_ranks(listener: &UnixListener) -> io::Result<(Vec<u64>, Vec<Arc<UnixStream>>)> {
    let mut here: Vec<(Hello, Arc<UnixStream>)> = Vec::new();
    while here.len() < here.first().map_or(1, |(hello, _)| hello.world as usize) {
        let (stream, _) = listener.accept()?;
        let hello: Hello = match socket::receive(&stream)? {
            (Kind::Hello, body) => bytemuck::try_pod_read_unaligned(&body).map_err(|_| io::ErrorKind::InvalidData)?,
            _ => continue,
        };
        here.push((hello, Arc::new(stream)));
        if let Some(text) = refusal(&here) {
            here.iter().for_each(|(_, stream)| drop(send(stream, Kind::Refused, &[text.as_bytes()])));
            return Err(io::ErrorKind::InvalidInput.into());
        }
    }
    here.sort_by_key(|(hello, _)| hello.rank);
    Ok(here.into_iter().map(|(hello, stream)| (hello.host, stream)).unzip())
}

/// A contradiction between the newest rank and the others.
fn refusal(here: &[(Hello, Arc<UnixStream>)]) -> Option<String> {
    let ((newest, _), others) = here.split_last()?;
    let Hello { rank, world, device, .. } = newest;
    let found = others.iter().map(|(other, _)| other).find_map(|other| match other {
        other if other.world != *world => {
            Some(format!("rank {} counts {} ranks, rank {rank} {world}", other.rank, other.world))
        }
        other if other.rank == *rank => Some(format!("two ranks {rank}")),
        other if other.device == *device => Some(format!("ranks {} and {rank} are on the same GPU", other.rank)),
        _ => None,
    });
    found.or_else(|| (rank >= world).then(|| format!("rank {rank} of {world}")))
}

fn listen_to(stream: &UnixStream, rank: usize, sender: &Sender<Message>) {
    loop {
        let message = receive(stream).ok();
        let is_last = message.as_ref().is_none_or(|(kind, _)| *kind == Kind::Bye);
        if sender.send((rank, message)).is_err() || is_last {
            return;
        }
    }
}

fn broadcast(ranks: &[Arc<UnixStream>], kind: Kind, body: &[u8]) {
    // A lost rank is detected by the thread that listens to it.
    ranks.iter().for_each(|stream| drop(send(stream, kind, &[body])));
}

/// Reduces until all ranks have left, or one is lost.
fn reduce_until_done(ranks: &[Arc<UnixStream>], messages: &Receiver<Message>) {
    let mut waiting: Vec<VecDeque<(Call, Vec<u8>)>> = ranks.iter().map(|_| VecDeque::new()).collect();
    let mut left = 0;
    loop {
        match messages.recv() {
            Ok((rank, Some((Kind::Call, body)))) => {
                let Some((call, numbers)) = body.split_at_checked(size_of::<Call>()) else { return };
                waiting[rank].push_back((bytemuck::pod_read_unaligned(call), numbers.to_vec()));
            }
            Ok((_, Some((Kind::Bye, _)))) => left += 1,
            Ok((rank, _)) => return broadcast(ranks, Kind::Lost, rank.to_string().as_bytes()),
            Err(_) => return,
        }
        if left == ranks.len() {
            return broadcast(ranks, Kind::Done, b"");
        }
        while waiting.iter().all(|calls| !calls.is_empty()) {
            let calls: Vec<_> = waiting.iter_mut().filter_map(VecDeque::pop_front).collect();
            match sum(&calls) {
                Ok(sum) => broadcast(ranks, Kind::Sum, &sum),
                Err(text) => return broadcast(ranks, Kind::Wrong, text.as_bytes()),
            }
        }
    }
}

/// The sum of all ranks' data in rank order, or how their calls differ.
fn sum(calls: &[(Call, Vec<u8>)]) -> Result<Vec<u8>, String> {
    let (first, _) = calls.first().ok_or("no rank")?;
    if let Some((rank, (other, _))) = calls.iter().enumerate().find(|(_, (call, _))| call != first) {
        return Err(difference(first, rank, other));
    }
    let format = i32::try_from(first.data_type).ok().and_then(format).ok_or("an unknown type")?;
    let rounded = |numbers: &[f32]| decoded(format, &encoded(format, numbers));
    let factor = f32::from_bits(first.operation as u32);
    let mut all = calls.iter().map(|(_, bytes)| {
        let numbers = decoded(format, bytes);
        if first.operation == SUM {
            return numbers;
        }
        rounded(&numbers.iter().map(|number| number * factor).collect::<Vec<_>>())
    });
    let mut sum = all.next().unwrap_or_default();
    for numbers in all {
        sum.iter_mut().zip(&numbers).for_each(|(sum, number)| *sum += number);
        sum = rounded(&sum);
    }
    Ok(encoded(format, &sum))
}

fn difference(first: &Call, rank: usize, other: &Call) -> String {
    let describe = |call: &Call| match first.place == other.place {
        true => format!("{} numbers of type {}, operation {}", call.count, call.data_type, call.operation),
        false => format!("the all-reduce in place {} of its device", call.place),
    };
    let (one, two, number) = (describe(first), describe(other), first.number);
    format!("call {number} of a communicator differs between ranks: rank 0 has {one}, rank {rank} has {two}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(data_type: u64, operation: u64, numbers: &[f32]) -> (Call, Vec<u8>) {
        let format = format(data_type as i32).unwrap();
        let call = Call { number: 1, place: 1, data_type, operation, count: numbers.len() as u64 };
        (call, encoded(format, numbers))
    }

    #[test]
    fn values_are_rounded_after_each_addition() {
        let sum_of = |data_type, operation, numbers: &[f32]| {
            let calls: Vec<_> = numbers.iter().map(|number| call(data_type, operation, &[*number])).collect();
            decoded(format(data_type as i32).unwrap(), &sum(&calls).unwrap())[0]
        };
        // 257 is not a bf16 value: 256 + 1 rounds to 256, twice.
        assert_eq!(sum_of(BFLOAT16, SUM, &[256.0, 1.0, 1.0]), 256.0);
        assert_eq!(sum_of(FLOAT32, SUM, &[256.0, 1.0, 1.0]), 258.0);
        assert_eq!(sum_of(FLOAT16, SUM, &[60000.0, 60000.0]), f32::INFINITY);
        assert_eq!(sum_of(FLOAT32, SCALED | u64::from(0.5f32.to_bits()), &[3.0, 5.0]), 4.0);
    }

    #[test]
    fn differing_calls_are_reported() {
        let (one, two) = (call(FLOAT32, SUM, &[1.0]), call(FLOAT32, SUM, &[1.0, 2.0]));
        let text = sum(&[one.clone(), two]).unwrap_err();
        assert!(text.contains("rank 0 has 1 numbers of type 7, operation 0, rank 1 has 2 numbers"), "{text}");
        let mut late = one.clone();
        late.0.place = 3;
        let text = sum(&[one, late]).unwrap_err();
        assert!(text.contains("rank 0 has the all-reduce in place 1 of its device, rank 1 has"), "{text}");
    }
}
