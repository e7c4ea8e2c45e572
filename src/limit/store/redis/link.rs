//! One open connection to one server: commands go in, answers come out, and an error of the server is an error.

use ::redis::aio::{ConnectionLike as _, MultiplexedConnection};
use ::redis::{Cmd, RedisError, Value};

/// An open connection. Cloning it gives another handle on the same one.
#[derive(Clone)]
pub(super) struct Link(MultiplexedConnection);

impl From<MultiplexedConnection> for Link {
    fn from(connection: MultiplexedConnection) -> Self {
        Self(connection)
    }
}

impl Link {
    /// Sends one command and waits for its answer, for ever if need be: the deadline is the caller's.
    pub(super) async fn ask(&mut self, command: &Cmd) -> Result<Value, RedisError> {
        self.0.send_packed_command(command).await.and_then(Value::extract_error)
    }

    /// The same, about a hash slot that is on its way to this node. The permission and the command are sent as one: on a connection
    /// that others use, too, nothing may come between the two.
    pub(super) async fn ask_in_passing(&mut self, command: &Cmd) -> Result<Value, RedisError> {
        let mut both = ::redis::pipe();
        both.cmd("ASKING").ignore().add_command(command.clone());
        let mut answers = self.0.req_packed_commands(&both, 1, 1).await?;
        answers.pop().unwrap_or(Value::Nil).extract_error()
    }
}

/// Whether `ROLE` answered that the server is a replica.
pub(super) fn says_replica(answer: &Value) -> bool {
    let Value::Array(parts) = answer else { return false };
    matches!(parts.first(), Some(Value::BulkString(word)) if word == b"slave")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_says_nothing_of_use_is_no_replica() {
        let texts = |words: &[&str]| {
            Value::Array(words.iter().map(|word| Value::BulkString(word.as_bytes().to_vec())).collect())
        };
        assert!(says_replica(&texts(&["slave", "127.0.0.1"])));
        for answer in [Value::Nil, texts(&[]), texts(&["master"]), texts(&["sentinel"])] {
            assert!(!says_replica(&answer), "{answer:?}");
        }
    }
}
