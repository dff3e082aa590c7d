// Package operate tests what an operator does: clean-up, pg_cron, status and doctor, durability, standbys, poolers, shards, and the fields of HTTP.
package operate

import (
	"testing"

	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }
