package httplimit

// Buckets counts those that are in memory.
func (m *Memory) Buckets() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.young) + len(m.old)
}
