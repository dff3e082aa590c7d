// Package citus tests the package on a Citus cluster, and the text of its functions there.
package citus

import (
	"testing"

	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }
