"""The process of one task: its end, its reports and its folders; its files, log and memory. No TensorFlow here."""
