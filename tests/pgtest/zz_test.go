package pgtest
import ("testing";"time")
func TestZZ(t *testing.T){ go func(){ time.Sleep(1200*time.Millisecond); panic("x") }(); New(t); time.Sleep(5*time.Second) }
