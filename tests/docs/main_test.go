// Package docs tests the documentation: its SQL is run, its Go compiled, its examples run, its links, grants and reference checked.
package docs

import (
	"testing"

	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }
