// Package acquire tests what a decision is: arithmetic and published vectors, retry_after as a promise, denials, idempotency,
// several limits and batches, transactions, concurrency, bad input, and plans of the statements.
package acquire

import (
	"testing"

	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }
