//! Determines the rank that wrote a line, from its prefix or the name of the log.

/// Characters of a line searched for its rank.
const SEARCHED: usize = 160;

/// Prefixes of launchers and process groups before the rank: torchrun and PyTorch, our supervisor,
/// Open MPI's `--tag-output` after the job, NCCL tests.
const MARKS: [&str; 4] = ["[rank", "[Rank ", "[rank ", " rank="];

/// The rank in the line's prefix.
pub(super) fn rank(line: &str) -> Option<u32> {
    let head = head(line);
    let marked = MARKS.iter().find_map(|mark| {
        let number = &head[head.find(mark)? + mark.len()..];
        leading_number(number).filter(|(_, rest)| rest.starts_with([']', ':', ' ']) || rest.is_empty())
    });
    marked.map(|(rank, _)| rank).or_else(|| tagged(head))
}

/// Parses `[1,3]<stderr>:` from mpirun and `[3]<stderr>:` from horovodrun.
fn tagged(line: &str) -> Option<u32> {
    let (tag, rest) = line.strip_prefix('[')?.split_once(']')?;
    let is_tag = rest.starts_with("<std");
    tag.rsplit(',').next()?.parse().ok().filter(|_| is_tag)
}

/// The number after a word, such as 3 in `originRank":3`.
pub(super) fn number_after(line: &str, word: &str) -> Option<u32> {
    let after = &line[line.find(word)? + word.len()..];
    leading_number(after.trim_start_matches([' ', ':', '"', '='])).map(|(number, _)| number)
}

fn leading_number(text: &str) -> Option<(u32, &str)> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    Some((text[..end].parse().ok()?, &text[end..]))
}

fn head(line: &str) -> &str {
    let mut end = line.len().min(SEARCHED);
    while !line.is_char_boundary(end) {
        end -= 1;
    }
    &line[..end]
}

/// The rank in a log's path: `rank-3.log`, `rank_3.out`, or torchrun's `attempt_0/3/stderr.log`.
pub(super) fn rank_of_path(path: &str) -> Option<u32> {
    let mut parts = path.rsplit('/');
    let name = parts.next()?;
    if let Some(at) = name.find("rank") {
        let number = name[at + 4..].trim_start_matches(['-', '_', '.']);
        return leading_number(number).map(|(rank, _)| rank);
    }
    let folder = parts.next()?;
    let is_stream = name.starts_with("stdout") || name.starts_with("stderr");
    folder.parse().ok().filter(|_| is_stream)
}

/// The attempt in a log's path: `attempt-2/…` or torchrun's `attempt_2/…`.
pub(super) fn attempt_of_path(path: &str) -> Option<u32> {
    path.rsplit('/').skip(1).find_map(|part| part.strip_prefix("attempt")?.trim_start_matches(['-', '_']).parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_lines() {
        for (line, wanted) in [
            ("[rank13]: Traceback (most recent call last):", Some(13)),
            ("[rank 3] error: rank 1: connection closed", Some(3)),
            ("[rank2]:[E1120 14:03:12.1 ProcessGroupNCCL.cpp:616] [Rank 2] Watchdog caught", Some(2)),
            ("[1,7]<stderr>: x", Some(7)),
            ("[7]<stdout>: x", Some(7)),
            ("gpu-01:77:99 [5] NCCL INFO x", None),
            ("[ranks 0-3] same", None),
            ("the rank of this", None),
            ("", None),
        ] {
            assert_eq!(rank(line), wanted, "{line}");
        }
    }

    #[test]
    fn ranks_and_attempts_of_paths() {
        assert_eq!(rank_of_path("runs/x/logs/attempt-2/rank-13.log"), Some(13));
        assert_eq!(attempt_of_path("runs/x/logs/attempt-2/rank-13.log"), Some(2));
        assert_eq!(
            (rank_of_path("t/attempt_0/3/stderr.log"), attempt_of_path("t/attempt_0/3/stderr.log")),
            (Some(3), Some(0))
        );
        assert_eq!((rank_of_path("job-worker-3.log"), attempt_of_path("job.log")), (None, None));
        assert_eq!((rank_of_path("a/3/x.log"), rank_of_path("")), (None, None));
    }

    #[test]
    fn numbers_after_words() {
        assert_eq!(number_after("{\"originRank\":3,", "originRank"), Some(3));
        assert_eq!(number_after("rank      : 12 (local_rank: 4)", "rank "), Some(12));
        assert_eq!(number_after("rank x", "rank "), None);
    }
}
