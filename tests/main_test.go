package tests

import (
	"testing"

	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func TestMain(m *testing.M) {
	if beLeaser() {
		return
	}
	pgtest.Main(tortured{m})
}
